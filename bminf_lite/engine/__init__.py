"""Generation in tokens: requests, the steps that run them, their memory, and the results. Text is not known here."""
