"""The live screen of `vjob status`; the only part that imports Textual."""
