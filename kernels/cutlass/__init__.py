"""CUTLASS as an engine, through its CuTe DSL. See docs/runtime.md."""
