"""Times strategies, kernels and decoders beside their serial twins and beside other libraries."""
