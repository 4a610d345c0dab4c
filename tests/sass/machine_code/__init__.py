"""Reads the machine code (SASS) of CUDA kernels and costs their hot loops. No GPU is needed.

disassembly -> instructions -> loops -> machine (cost of one instruction) -> simulation -> analysis
"""
