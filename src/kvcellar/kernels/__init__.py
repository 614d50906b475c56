"""kernels: C++ that is compiled on the machine it runs on, and linear layers and convolutions made fast on a CPU."""
