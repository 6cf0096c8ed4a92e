"""What the Hopper and Blackwell kernels share: hooks, device functions, TMA, sums, combine."""
