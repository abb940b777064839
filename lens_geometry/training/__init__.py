"""Training under suppression: a small trainer that one reads in one sitting."""
