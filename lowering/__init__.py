"""Ground floor: GPU targets, tile program -> CUDA -> cubin, kernel cache, bundles, launch, errors."""
