"""The operations a decoder is made of: one interface (`base`), and an implementation per array library.

`reference` is numpy: the meaning of every operation, what kernels are tested against, and what runs where no
kernel was built.
"""
