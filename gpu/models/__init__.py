"""The models in torch.

In reading order:

layers            Linear layers, norms, rotary embedding, activations, embeddings, and their weights.
state_layers      Layers with a state for each request: short convolutions, Mamba 2, gated delta nets.
blocks            A transformer's layer: attention, feed-forward network, experts.
gemma             The layers of Gemma 3n and 4, and their per-layer embeddings.
decoder           The decoder-only transformer, built from a model's specification.
encoder           An encoder, from its specification.
communicators     Tensor ranks by torch.distributed, and tensors in shared memory.
torch_model       `CausalLM` behind the runner's interface: numpy in, numpy out.
transformers_model  Decoders that transformers implements, with paged attention.
"""
