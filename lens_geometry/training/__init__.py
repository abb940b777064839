"""Training small models with and without suppression: a trainer that one reads in one sitting."""
