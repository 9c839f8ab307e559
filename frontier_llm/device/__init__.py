"""Devices and their kernels: the only package that distinguishes CPU, CUDA and HIP by name."""
