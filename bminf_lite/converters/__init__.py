"""Files as CPM-1, CPM-2 and EVA were published, into Hugging Face folders."""
