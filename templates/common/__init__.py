"""What the Hopper and Blackwell kernels share: hooks, work tiles, semaphores, preprocess, combine."""
