# ruff: noqa: RUF001
"""The prompts and strings that goldens are made of; :mod:`make_goldens` writes them, the tests read them."""

from __future__ import annotations

NUM_TOKENS = 24
"""Tokens generated for each prompt; end-of-turn tokens do not stop it."""

CHATS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "How many legs do three spiders have?",
    "Explain paging in an operating system to a child.",
    "Translate to Spanish: The library opens at nine.",
    "Name five fruits.",
    "Wie heißt die Hauptstadt von Österreich?",
    "Give me a Python function that reverses a list.",
    "日本の首都はどこですか。",
    "I feel tired today 😴. What should I do?",
)

PLAIN = (
    "Once upon a time, in a village by the river,",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "On 20 July 1969, two astronauts",
    "Dear Sir or Madam,\n\nI am writing to",
    "A",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n-  1 pinch of salt\n\nMethod:\n",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Naïve café owners façade their über-prices: €5,50 — or £4.75…",
    " ".join(f"Item {i} costs {i * 7 % 13} coins." for i in range(1, 31)) + " Item 31 costs",
)

STRINGS = (
    "",
    " ",
    "Hello world",
    "  two  spaces   and\ttabs\n\n\nnewlines ",
    "digits 0 12 345 6789 3.14159 1e-5 1,000,000",
    "spaces before digits  1   22\n 3\t4",
    "naïve café, ÀÉÎÕÜ ß ñ — “quotes” … €",
    "日本語とEnglish混在テキスト。한국어 العربية עברית हिन्दी",
    "emoji 😀 👩‍👩‍👧‍👦 🇫🇷 1️⃣ ❤️",
    "combining e\u0301 vs é, zero\u200bwidth, \u00a0nbsp, \ufeffbom",
    "control \x00\x01\x7f and \ufffd",
    "<|im_start|>user\nliteral special<|im_end|>\n<|endoftext|>",
    "almost special <|im_star|> <im_end> <|im_end|",
    "it's we'll they've I'M DON'T 'tis",
    "snake_case camelCase SCREAMING_CASE kebab-case a.b->c()::d",
    "½ ² Ⅷ ٣ 五 ①",
    "𝒳 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈",
    "line\r\nwindows\rmac\u2028sep",
)

MESSAGES = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 2 + 2 ? "}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello.\n"},
        {"role": "user", "content": "<b>&amp;</b> {{ x }} {% y %}"},
    ],
)
