"""What the kernels for SM90 share: pieces of CUDA C++, and how a source includes them."""
