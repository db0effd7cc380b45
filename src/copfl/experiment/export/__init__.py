"""A bundle in the formats of others: ONNX, torch, safetensors, PEFT, MLflow."""
