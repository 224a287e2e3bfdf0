"""From logits to tokens, and the verdict on drafts."""
