"""Problems, tile configurations, the cost model and the choice between them."""
