"""Tokens that an issuer signs: a Kubernetes cluster or an OpenID provider.

The coordinator checks them offline, by the issuer's public keys. The rules of the tokens file turn a verified
token into a grant, which ends with the token.
"""
