"""Float64 references of the operators, on the CPU: plain mathematics with no tiling, one module an operator."""
