"""Logits to token ids.

In reading order:

columns     The columns of the row table that sampling declares, and the filters.
torch_draw  The draw in torch, the reference of the C++ library's.
logits      Bias, penalties and masks.
draw        Greedy choice, counter-based noise, and sampling over ranks that each hold a part of the vocabulary.
sampler     `Sampler`: a step's logits in, one token and its log-probabilities per row out.
"""
