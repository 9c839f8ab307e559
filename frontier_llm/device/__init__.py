"""The room where the words cuda and hip are said: devices, kernels, and what they can do."""
