"""Everything that continues text: prompts in portions, steps that a GPU replays, draws, stop words.

`headwater.generate` continues tokens, `text_pieces.continue_texts` text. The room is not called
generate: `headwater.generate` is the function.
"""
