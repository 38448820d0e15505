"""Reranking, scores, classes and pooled vectors, as Cohere, Jina and vLLM offer them.

In reading order:

requests  Bodies, the pairs of texts in them, and the prompt of Qwen3-Reranker.
answers   Logits to scores, shapes of answers, writers.
dialect   The dialect's record, and its errors.
"""
