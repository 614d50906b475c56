"""Several engines behind gateways: which of them a request goes to."""
