"""Text to windows of tokens: corpus, tokenizer, dataset."""
