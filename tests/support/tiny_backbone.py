"""A small random Qwen3 with a tokenizer of bytes, as a folder: a real backbone that no hub is
needed for."""

from pathlib import Path

BYTES = 256
HIDDEN = 32


def tiny_backbone(folder: Path, seed: int = 0, vocabulary: int = BYTES + 1) -> Path:
    """Write the backbone into the folder, and return the folder. The same seed gives the same
    weights.

    Its libraries take seconds to import, which only tests that need a backbone should spend.
    """
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

    torch.set_num_threads(1)  # of a model this small; other tests run beside these
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=vocabulary,
        max_position_embeddings=2_048,
    )
    Qwen3Model(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder
