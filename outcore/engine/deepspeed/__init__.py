"""DeepSpeed's ZeRO engine: several GPUs, several hosts, and every model shape."""
