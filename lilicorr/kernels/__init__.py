"""The kernels of serving: for each a plain PyTorch reference, a Triton version and the choice between them.

Place in the flow: `lattice`, the heads and `engine` call the public function of a file, in which its reference stands
too; only that of `accept` is `verify.verify`, the older definition. A tensor on a GPU goes to the Triton version, any
other to the reference, and so does on a GPU a law of more ids than `accept_triton` takes. The `*_triton` functions
can be called with CPU tensors under Triton's interpreter, which is how the tests hold them against the references.
"""
