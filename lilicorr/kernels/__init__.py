"""The kernels of serving: each file holds a plain PyTorch reference, its Triton version and the choice between them.

Place in the flow: `lattice`, the heads and `engine` call the functions named after the files. A tensor on a GPU goes
to the Triton version, any other to the reference; nothing else decides. The `*_triton` functions can be called with
CPU tensors under Triton's interpreter, which is how the tests hold them against the references.
"""
