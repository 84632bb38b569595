"""Reading text with any language model: prefix sharing, completion, scoring."""
