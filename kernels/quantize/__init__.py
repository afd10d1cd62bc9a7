"""Quantize weights on a GPU, to the bytes that `moequant.formats` defines.

One launch a format, two for nvfp4, which must know the largest weight of a fused set first. Every
weight is read once by each launch and every byte written once.

Where these differ from the reference functions in more than the order of independent operations:

* products with the reciprocal of a power of two stand for quotients: the reciprocal is a normal
  float32, so both are the same real number, rounded once;
* signs are put aside: rounding to nearest is symmetric, and so are quotients by positive numbers;
* magnitudes are compared as integers, whose order is that of the floats they are;
* quotients by the scale of a group share its reciprocal; `words.quotients` says why they are the
  same codes.

All else is what IEEE 754 says: `div_rn` and not `/`, which Triton rounds as it likes, no product
fused with a sum unless it is written so (`EXACT`), and no denormal flushed.
"""
