"""How text becomes the words of the BM25 index: the same code when building and when asking.

A question is words, never query syntax: its tokens become term queries, so no question can be
malformed. ``ANALYZER`` names this file's behaviour in every manifest. A change of what a text
turns into must change it too, or old indexes would be searched with words they do not hold.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

import tantivy
from tantivy import Filter, SchemaBuilder, TextAnalyzerBuilder, Tokenizer

ANALYZER: Final = "english-1"
TOKENIZER: Final = "english"

# Stored fields are bytes because tantivy has no stored-only text; the searched text is not stored.
ID: Final = "id"
CONTENTS: Final = "contents"
TEXT: Final = "text"

TOKEN_BYTES_MAX: Final = 40  # longer tokens (hashes, URLs without marks) do not occur in questions

# The common 33; dropping them from a question leaves a tenth of the postings and the same recall.
STOP_WORDS: Final = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with"
)

# Han, Hiragana and Katakana run on without spaces, and the tokenizer splits at spaces and marks
# only: a sentence would be one token, which no question matches. Spelled as ranges, because a class
# of the Unicode database would change with the interpreter.
_IDEOGRAPHIC: Final = re.compile(
    "[\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303c\u3041-\u3096\u309d-\u309f"
    "\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff66-\uff9d\U00020000-\U000323af]"
)


def analyzer() -> tantivy.TextAnalyzer:
    """Simple tokens, folded to ASCII, in lower case, English stems. Safe to share among threads."""
    builder = TextAnalyzerBuilder(Tokenizer.simple())
    for step in (
        Filter.remove_long(TOKEN_BYTES_MAX),
        Filter.ascii_fold(),  # before lowercase: folding may yield capitals
        Filter.lowercase(),
        Filter.stemmer("english"),
    ):
        builder = builder.filter(step)  # consumes the builder it is called on
    return builder.build()


def schema() -> tantivy.Schema:
    """The stored id and contents, and the words with their frequencies (no positions)."""
    builder = SchemaBuilder()
    builder.add_bytes_field(ID, stored=True, indexed=False)
    builder.add_bytes_field(CONTENTS, stored=True, indexed=False)
    builder.add_text_field(TEXT, tokenizer_name=TOKENIZER, index_option="freq")
    return builder.build()


def prepared(text: str) -> str:
    """``text`` as the analyzer is given it: composed (NFC), ideographs apart. Total: a lone
    surrogate, which has no UTF-8 form, becomes a question mark.
    """
    if text.isascii():
        return text
    plain = text.encode("utf-8", "replace").decode("utf-8")
    return _IDEOGRAPHIC.sub(r" \g<0> ", unicodedata.normalize("NFC", plain))
