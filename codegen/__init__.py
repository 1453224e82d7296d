"""Generator of specialised CUDA kernels for fixed shapes: a YAML spec in, readable sources out."""
