"""What the GPU side of the primitives says, without a GPU: its PTX is interpreted, or compared with written-down instructions."""
