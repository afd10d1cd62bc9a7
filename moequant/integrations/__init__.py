"""moequant's experts in models of other libraries, one module per library."""
