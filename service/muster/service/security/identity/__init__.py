"""Identity without secrets of ours: tokens that an issuer signs, a cluster or an OpenID provider.

They are checked offline, by the issuer's public keys. A verified token becomes a grant by the rules of the
tokens file, and ends when the token does.
"""
