"""cache: what does one model remember on the device? Cells, layouts, the K/V pools, and the memory's face."""
