"""What a model is: our YAML, published configs, drafters' configs, RoPE."""
