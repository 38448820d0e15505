"""The families of models that are served.

In reading order:

dense        Ministral 3, Phi 3 and 4, Granite 3, SmolLM3, OLMo 2 and 3, GLM-4.
deepseek     DeepSeek V2 and V3, Kimi K2, GLM-4.5 to 4.7.
gemma        Gemma 2, 3, 3n and 4.
encoders     BERT, RoBERTa, DistilBERT, NomicBERT, ModernBERT, EmbeddingGemma.
hybrid       LFM2 and Granite 4.
qwen_hybrid  Qwen3-Next and Qwen3.5.
table        All families by their names in files, with their specifications.
"""
