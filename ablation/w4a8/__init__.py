"""Pipelines that `w4a8.gemm` is compared with: LiquidGEMM's others on wgmma, and QServe's dequantization."""
