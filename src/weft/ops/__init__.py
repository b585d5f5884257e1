"""The operations of a decoder: one interface (`base`), and one implementation per array library.

`texts` adds the operations that only text encoders need. `reference` is the numpy implementation. It defines every
operation: kernels are tested against it. It also runs where no kernels were built.
"""
