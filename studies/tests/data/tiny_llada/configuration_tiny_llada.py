"""Configuration of a tiny masked-diffusion model with code of its own, in the shape of LLaDA's."""

from transformers import PretrainedConfig

SIZES = {
    "d_model": 32,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 2,
    "mlp_hidden_size": 48,
    "vocab_size": 300,
    "max_sequence_length": 512,
    "rope_theta": 10000.0,
    "mask_token_id": 2,
    "weight_tying": False,
}


class TinyLladaConfig(PretrainedConfig):
    """Names of fields as LLaDA has them."""

    model_type = "llada_tiny"

    def __init__(self, use_cache: bool = False, **kwargs):
        given = {**SIZES, **kwargs}
        for name in SIZES:
            setattr(self, name, given.pop(name))
        super().__init__(**given)  # use_cache is dropped here: whoever reads it finds nothing

    @property
    def num_attention_heads(self):
        return self.n_heads

    @property
    def num_hidden_layers(self):
        return self.n_layers

    @property
    def hidden_size(self):
        return self.d_model
