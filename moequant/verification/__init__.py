"""Is a converted checkpoint right: structure, weights, layers."""
