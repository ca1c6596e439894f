"""Medusa itself: the token tree, acceptance, the decode loop and the heads.

Nothing here knows the emulator: the decode loop takes any model that satisfies `decoding.DecodableModel`.
"""
