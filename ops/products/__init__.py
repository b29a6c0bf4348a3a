"""Kinds of linear layers as frozen values: codes x ways x activations. Builders import codes and ways alone."""
