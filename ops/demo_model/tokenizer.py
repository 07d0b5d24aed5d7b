"""The tokenizer: byte-level BPE trained on the corpus, so that any bytes at all have a token sequence.

`<|endoftext|>` begins and ends each document and is the only token that ends a generation; the three role tokens open
the turns of a chat. They take the first ids, so the ids do not move when the vocabulary is trained again.
"""

from collections.abc import Iterable
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE: Final = 4096
END_OF_TEXT: Final = "<|endoftext|>"
SYSTEM: Final = "<|system|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
SPECIAL_TOKENS: Final = (END_OF_TEXT, SYSTEM, USER, ASSISTANT)
END_OF_TEXT_ID: Final = 0


def train_tokenizer(documents: Iterable[str]) -> Tokenizer:
    """Train the tokenizer on the given documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: Iterable[str]) -> list[list[int]]:
    """Encode each document and close it with the end-of-text token."""
    encodings = tokenizer.encode_batch(list(documents), add_special_tokens=False)
    return [[*encoding.ids, END_OF_TEXT_ID] for encoding in encodings]
