"""Our experts in the models of other libraries; each module needs its library, and says so."""
