"""Device library of all programs of attention: primitives, copies, tiles of packed tokens."""
