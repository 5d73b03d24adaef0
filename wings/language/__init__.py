"""Language: a decoder over bytes, the task of the next token, and its sweep."""
