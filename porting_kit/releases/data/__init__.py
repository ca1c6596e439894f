"""One module per release range; each defines `FACTS`, a `porting_kit.releases.facts.ReleaseFacts`."""
