"""Logits to token ids.

In reading order:

columns  The columns of the row table that sampling declares, and the filters.
logits   Bias, penalties and masks.
draw     Greedy choice, counter-based noise, the draw in numpy, and sampling over ranks that each hold a part of the
         vocabulary.
sampler  `sample`: a step's logits in, one token and its log-probabilities per row out.
"""
