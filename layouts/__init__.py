"""Linear maps over bits, fragments, converters and the derivation of packed layouts."""
