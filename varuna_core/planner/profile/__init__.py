"""What a model costs and what links take, as data: read, written, or estimated from data sheets."""
