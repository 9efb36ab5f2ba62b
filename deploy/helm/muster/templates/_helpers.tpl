{{- define "muster.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- /* 52: Kubernetes appends up to 11 characters to a StatefulSet's name in a label, which may have 63. */}}
{{- define "muster.fullname" -}}
{{- $name := include "muster.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "muster.headless" -}}
{{ include "muster.fullname" . }}-headless
{{- end }}

{{- define "muster.http" -}}
{{ include "muster.fullname" . }}-http
{{- end }}

{{- /* Whether several replicas may share the state. */}}
{{- define "muster.etcd" -}}
{{- if eq .Values.state.type "etcd" }}yes{{ end }}
{{- end }}

{{- define "muster.state" -}}
{{- if include "muster.etcd" . }}
{{- $prefix := default (printf "%s/%s" .Release.Namespace (include "muster.fullname" .)) .Values.state.etcd.prefix }}
{{- printf "etcd://%s/%s" (join "," .Values.state.etcd.endpoints) (trimAll "/" $prefix) }}
{{- else -}}
sqlite:////var/lib/muster/muster.db
{{- end }}
{{- end }}

{{- /* The names of all pods, each of which the headless Service knows by its own. */}}
{{- define "muster.pods" -}}
{{ include "muster.headless" . }}.{{ .Release.Namespace }}.svc
{{- end }}

{{- /* As variables, so that `kubectl exec … muster backup` reaches etcd as the coordinator does. */}}
{{- define "muster.etcd.env" -}}
{{- $etcd := .Values.state.etcd }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: MUSTER_SERVE_ADVERTISE
  value: {{ default (printf "$(POD_NAME).%s:7550" (include "muster.pods" .)) .Values.advertise | quote }}
{{- if $etcd.tls.existingSecret }}
- name: MUSTER_SERVE_ETCD_CA
  value: /etc/muster/etcd/ca.crt
{{- if $etcd.tls.clientCertificate }}
- name: MUSTER_SERVE_ETCD_CERT
  value: /etc/muster/etcd/tls.crt
- name: MUSTER_SERVE_ETCD_KEY
  value: /etc/muster/etcd/tls.key
{{- end }}
{{- end }}
{{- with $etcd.user }}
- name: MUSTER_SERVE_ETCD_USER
  value: {{ . | quote }}
- name: MUSTER_SERVE_ETCD_PASSWORD_FILE
  value: /etc/muster/etcd/password
{{- end }}
{{- end }}

{{- define "muster.etcd.wanted" -}}
{{- if and (include "muster.etcd" .) (or .Values.state.etcd.tls.existingSecret .Values.state.etcd.user) }}yes{{ end }}
{{- end }}

{{- define "muster.etcd.volume" -}}
{{- $etcd := .Values.state.etcd }}
- name: etcd
  projected:
    defaultMode: 0440
    sources:
      {{- with $etcd.tls.existingSecret }}
      - secret:
          name: {{ . }}
          items:
            - {key: ca.crt, path: ca.crt}
            {{- if $etcd.tls.clientCertificate }}
            - {key: tls.crt, path: tls.crt}
            - {key: tls.key, path: tls.key}
            {{- end }}
      {{- end }}
      {{- with $etcd.passwordSecret }}
      - secret:
          name: {{ . }}
          items:
            - {key: password, path: password}
      {{- end }}
{{- end }}

{{- define "muster.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "muster.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "muster.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- /* What never changes in the life of a release: selectors and the volume claim are made of these. */}}
{{- define "muster.identity" -}}
app.kubernetes.io/name: {{ include "muster.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "muster.podIdentity" -}}
{{ include "muster.identity" . }}
app.kubernetes.io/component: coordinator
{{- end }}

{{- define "muster.testIdentity" -}}
{{ include "muster.identity" . }}
app.kubernetes.io/component: test
{{- end }}

{{- /* Of an object. Takes the root, its component, and labels from values; the chart's own win. */}}
{{- define "muster.labels" -}}
{{- $root := index . 0 }}
{{- $own := include "muster.identity" $root | fromYaml }}
{{- $_ := set $own "app.kubernetes.io/component" (index . 1) }}
{{- $_ := set $own "app.kubernetes.io/version" $root.Chart.AppVersion }}
{{- $_ := set $own "app.kubernetes.io/managed-by" $root.Release.Service }}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_") }}
{{- range slice . 2 }}
{{- $own = merge $own . }}
{{- end }}
{{- toYaml (merge $own $root.Values.commonLabels) }}
{{- end }}

{{- /* The name under which clients in other namespaces reach it. */}}
{{- define "muster.host" -}}
{{ include "muster.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end }}

{{- /* The job label of its metrics. With the namespace, since names are there once in a namespace only. */}}
{{- define "muster.job" -}}
{{ .Release.Namespace }}/{{ include "muster.fullname" . }}
{{- end }}

{{- /* A hash of the content is in the name: a pod reads what it was made with, whatever an upgrade brings or leaves half done. */}}
{{- define "muster.config" -}}
{{ include "muster.fullname" . }}-config-{{ include "muster.toml" . | sha256sum | trunc 10 }}
{{- end }}

{{- /* With OnDelete the pod runs on after an upgrade: what it reads by name must, too. */}}
{{- define "muster.keep" -}}
{{- if eq .Values.updateStrategy.type "OnDelete" }}
annotations:
  helm.sh/resource-policy: keep
{{- end }}
{{- end }}

{{- /* Helm removes a Secret that it made and makes no more, and makes none where another's is: those in the values have names that nobody else would give. */}}
{{- define "muster.tlsInline" -}}
{{ include "muster.fullname" . }}-tls-inline
{{- end }}

{{- define "muster.tokensInline" -}}
{{ include "muster.fullname" . }}-tokens-inline
{{- end }}

{{- define "muster.tlsSecret" -}}
{{- if .Values.tls.certManager.enabled }}
{{- include "muster.fullname" . }}-tls
{{- else }}
{{- default (include "muster.tlsInline" .) .Values.tls.existingSecret }}
{{- end }}
{{- end }}

{{- define "muster.clientCaSecret" -}}
{{- default (include "muster.tlsSecret" .) .Values.tls.clientAuth.existingSecret }}
{{- end }}

{{- define "muster.tokensSecret" -}}
{{- default (include "muster.tokensInline" .) .Values.tokens.existingSecret }}
{{- end }}

{{- define "muster.tokens.inline" -}}
{{- if or .Values.tokens.entries .Values.tokens.serviceAccounts.entries }}yes{{ end }}
{{- end }}

{{- /* The tokens file of what is in the values. JSON's scalars and lists of them are TOML's. */}}
{{- define "muster.tokens.toml" -}}
{{- range .Values.tokens.entries }}
[[token]]
{{- range $key, $value := . }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- with .Values.tokens.serviceAccounts }}
{{- if .entries }}
[[issuer]]
name = "cluster"
url = {{ toJson .issuer }}
keys_url = "https://kubernetes.default.svc/openid/v1/jwks"
ca_file = "/etc/muster/kubernetes/ca.crt"
token_file = "/etc/muster/kubernetes/token"
{{- end }}
{{- range .entries }}
[[service_account]]
{{- range $key, $value := . }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* What the keys of the cluster are got with, which everyone may who has a service account. */}}
{{- define "muster.kubernetes.wanted" -}}
{{- if and .Values.tokens.enabled .Values.tokens.serviceAccounts.enabled }}yes{{ end }}
{{- end }}

{{- define "muster.kubernetes.mount" -}}
- name: kubernetes
  mountPath: /etc/muster/kubernetes
  readOnly: true
{{- end }}

{{- define "muster.kubernetes.volume" -}}
- name: kubernetes
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3600
      - configMap:
          name: kube-root-ca.crt
          items:
            - {key: ca.crt, path: ca.crt}
{{- end }}

{{- /* Where it is: a policy sees the port of the API server itself or of its Service, as the network plugin has it. */}}
{{- define "muster.kubernetes.egress" -}}
- ports:
    - port: 443
    - port: 6443
  {{- with .Values.networkPolicy.apiServerTo }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- /* What all Certificates of cert-manager have in common. */}}
{{- define "muster.certificate" -}}
issuerRef:
  {{- toYaml .Values.tls.certManager.issuerRef | nindent 2 }}
duration: {{ .Values.tls.certManager.duration }}
renewBefore: {{ .Values.tls.certManager.renewBefore }}
privateKey:
  algorithm: ECDSA
  size: 256
  rotationPolicy: Always
usages: [digital signature, server auth]
{{- end }}

{{- define "muster.httpScheme" -}}
{{ and .Values.tls.enabled .Values.tls.http | ternary "HTTPS" "HTTP" }}
{{- end }}

{{- /* The configuration that `muster serve` reads. JSON's scalars are TOML's. */}}
{{- define "muster.toml" -}}
listen = {{ printf "%s:7550" (include "muster.bindHost" .) | toJson }}
http = {{ printf "%s:7551" (include "muster.bindHost" .) | toJson }}
{{- range $name, $value := .Values.settings }}
{{ $name }} = {{ toJson $value }}
{{- end }}
{{- if .Values.tls.enabled }}
tls_cert = "/etc/muster/tls/tls.crt"
tls_key = "/etc/muster/tls/tls.key"
http_tls = {{ .Values.tls.http }}
{{- if .Values.tls.clientAuth.enabled }}
tls_client_ca = "/etc/muster/client-ca/ca.crt"
{{- end }}
{{- end }}
{{- if not (and (include "muster.secured" .) (include "muster.httpSecured" .)) }}
insecure = true
{{- end }}
{{- if .Values.tokens.enabled }}
tokens_file = "/etc/muster/tokens/tokens.toml"
http_tokens = {{ .Values.tokens.http }}
{{- end }}
{{- end }}

{{- /* Whether the ports for workers speak TLS, and ask who calls. */}}
{{- define "muster.secured" -}}
{{- if and .Values.tls.enabled (or .Values.tokens.enabled .Values.tls.clientAuth.enabled) }}yes{{ end }}
{{- end }}

{{- /* Whether the coordinator's HTTP port does. */}}
{{- define "muster.httpSecured" -}}
{{- if and .Values.tls.enabled .Values.tls.http (or (and .Values.tokens.enabled .Values.tokens.http) .Values.tls.clientAuth.enabled) }}yes{{ end }}
{{- end }}

{{- define "muster.bindHost" -}}
{{ contains ":" .Values.bindAddress | ternary (printf "[%s]" .Values.bindAddress) .Values.bindAddress }}
{{- end }}

{{- /* What a Service has of values, besides its ports. Takes these values. */}}
{{- define "muster.service" -}}
type: {{ .type }}
{{- range $key := list "ipFamilyPolicy" "ipFamilies" "loadBalancerClass" "loadBalancerSourceRanges" "externalTrafficPolicy" }}
{{- with index $ $key }}
{{ dict $key . | toYaml }}
{{- end }}
{{- end }}
{{- end }}

{{- define "muster.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end }}

{{- define "muster.podSecurity" -}}
{{- with .Values.podSecurity }}
{{ toYaml . }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- /* What all of the chart's pods have in common. */}}
{{- define "muster.pod" -}}
serviceAccountName: {{ include "muster.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "muster.podSecurity" . | trim | nindent 2 }}
{{- range $key := list "imagePullSecrets" "runtimeClassName" "hostAliases" "dnsPolicy" "dnsConfig" "nodeSelector" "tolerations" }}
{{- with index $.Values $key }}
{{ dict $key . | toYaml }}
{{- end }}
{{- end }}
{{- end }}

{{- /* What a `muster` command in one of the chart's pods needs to reach the coordinator. Takes the root, the endpoint, the names of its Secrets, and the name in the coordinator's certificate if it is not the endpoint's. */}}
{{- define "muster.client.env" -}}
{{- $values := .root.Values }}
- name: MUSTER_ENDPOINT
  value: {{ .endpoint | quote }}
{{- if $values.tls.enabled }}
- name: MUSTER_TLS_CA
  value: /etc/muster/client/ca.crt
{{- with .name }}
- name: MUSTER_TLS_SERVER_NAME
  value: {{ . }}
{{- end }}
{{- if .secrets.certificateSecret }}
- name: MUSTER_TLS_CERT
  value: /etc/muster/client/tls.crt
- name: MUSTER_TLS_KEY
  value: /etc/muster/client/tls.key
{{- end }}
{{- end }}
{{- if and $values.tokens.enabled (or .secrets.tokenSecret .secrets.ownToken) }}
- name: MUSTER_TOKEN_FILE
  value: /etc/muster/client/token
{{- end }}
{{- end }}

{{- /* Takes the root and the names of the Secrets, as the next but one. With `ownToken` among them, the pod shows the token of its service account. */}}
{{- define "muster.client.wanted" -}}
{{- $values := .root.Values }}
{{- if or $values.tls.enabled (and $values.tokens.enabled (or .secrets.tokenSecret .secrets.ownToken)) }}yes{{ end }}
{{- end }}

{{- define "muster.client.mount" -}}
- name: client
  mountPath: /etc/muster/client
  readOnly: true
{{- end }}

{{- /* The Secret whose ca.crt the chart's own clients trust. */}}
{{- define "muster.trustSecret" -}}
{{- .Values.client.caSecret | default (include "muster.tlsSecret" .) }}
{{- end }}

{{- /* Optional, so that the coordinator starts before the Secrets of its clients are there. */}}
{{- define "muster.client.volume" -}}
{{- $values := .root.Values }}
- name: client
  projected:
    defaultMode: 0440
    sources:
      {{- if $values.tls.enabled }}
      - secret:
          name: {{ include "muster.trustSecret" .root }}
          items:
            - {key: ca.crt, path: ca.crt}
          optional: true
      {{- with .secrets.certificateSecret }}
      - secret:
          name: {{ . }}
          items:
            - {key: tls.crt, path: tls.crt}
            - {key: tls.key, path: tls.key}
          optional: true
      {{- end }}
      {{- end }}
      {{- if and $values.tokens.enabled .secrets.tokenSecret }}
      - secret:
          name: {{ .secrets.tokenSecret }}
          items:
            - {key: token, path: token}
          optional: true
      {{- else if and $values.tokens.enabled .secrets.ownToken }}
      - serviceAccountToken:
          audience: muster
          expirationSeconds: 3600
          path: token
      {{- end }}
{{- end }}

{{- /* Values that contradict each other, which a schema cannot say in a sentence. */}}
{{- define "muster.check" -}}
{{- $tls := .Values.tls }}
{{- $inline := or $tls.certificate $tls.privateKey $tls.ca }}
{{- if $tls.enabled }}
{{- $ways := 0 }}
{{- range list $tls.existingSecret $tls.certManager.enabled $inline }}
{{- if . }}{{ $ways = add1 $ways }}{{ end }}
{{- end }}
{{- if ne (int $ways) 1 }}
{{- fail "tls.enabled: give the certificate in one way: tls.existingSecret, tls.certManager.enabled, or tls.certificate with tls.privateKey." }}
{{- end }}
{{- if and $inline (not (and $tls.certificate $tls.privateKey)) }}
{{- fail "tls.certificate and tls.privateKey belong together: set both." }}
{{- end }}
{{- if and $tls.clientAuth.enabled $inline (not $tls.ca) (not $tls.clientAuth.existingSecret) }}
{{- fail "tls.clientAuth.enabled: say which CA signs the clients' certificates: set tls.ca or tls.clientAuth.existingSecret." }}
{{- end }}
{{- else if or $tls.clientAuth.enabled $tls.existingSecret $inline }}
{{- fail "tls.enabled is false, but a certificate or tls.clientAuth is given: set tls.enabled=true, or remove the others." }}
{{- end }}
{{- if and $tls.certManager.enabled (not $tls.certManager.issuerRef.name) }}
{{- fail "tls.certManager.enabled: name the issuer in tls.certManager.issuerRef.name." }}
{{- end }}
{{- range $value, $names := dict "tls.existingSecret" (list $tls.existingSecret (include "muster.tlsInline" .)) "tokens.existingSecret" (list .Values.tokens.existingSecret (include "muster.tokensInline" .)) }}
{{- if eq (index $names 0) (index $names 1) }}
{{- fail (printf "%s: %q is the name of the Secret that the chart makes of values, and Helm removes it when they go: give yours another name." $value (index $names 0)) }}
{{- end }}
{{- end }}
{{- if .Values.tokens.enabled }}
{{- if eq (empty .Values.tokens.existingSecret) (empty (include "muster.tokens.inline" .)) }}
{{- fail "tokens.enabled: give the tokens in one way: tokens.existingSecret, or tokens.entries and tokens.serviceAccounts.entries." }}
{{- end }}
{{- if and .Values.tokens.serviceAccounts.entries (not .Values.tokens.serviceAccounts.enabled) }}
{{- fail "tokens.serviceAccounts.enabled is false, but entries are given: set it to true, or remove them." }}
{{- end }}
{{- else if or .Values.tokens.existingSecret (include "muster.tokens.inline" .) .Values.tokens.serviceAccounts.enabled }}
{{- fail "tokens.enabled is false, but tokens are given: set tokens.enabled=true, or remove them." }}
{{- end }}
{{- $name := include "muster.fullname" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- fail (printf "%q is to be the name of a Service, and must be a DNS label that begins with a letter: set fullnameOverride." $name) }}
{{- end }}
{{- range $name, $service := dict "service" .Values.service "httpService" .Values.httpService }}
{{- $outside := dict "loadBalancerClass" (list "LoadBalancer") "loadBalancerSourceRanges" (list "LoadBalancer") "externalTrafficPolicy" (list "NodePort" "LoadBalancer") "nodePort" (list "NodePort" "LoadBalancer") }}
{{- range $key, $types := $outside }}
{{- if and (index $service $key) (not (has $service.type $types)) }}
{{- fail (printf "%s.%s is for a Service of type %s, and %s.type is %s: change that, or remove %s." $name $key (join " or " $types) $name $service.type $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) }}
{{- fail "ingress.enabled: say for which hosts in ingress.hosts, such as [{host: muster.example.org}]." }}
{{- end }}
{{- $etcd := .Values.state.etcd }}
{{- if include "muster.etcd" . }}
{{- if not $etcd.endpoints }}
{{- fail "state.type is etcd: say where it is in state.etcd.endpoints, such as [etcd-0.etcd.etcd.svc:2379, etcd-1.etcd.etcd.svc:2379]." }}
{{- end }}
{{- if .Values.persistence.existingClaim }}
{{- fail "persistence.existingClaim is given, but state.type is etcd: nothing would be kept on it." }}
{{- end }}
{{- if and $etcd.tls.clientCertificate (not $etcd.tls.existingSecret) }}
{{- fail "state.etcd.tls.clientCertificate: name the Secret that has it in state.etcd.tls.existingSecret, with the ca.crt of etcd's own certificates." }}
{{- end }}
{{- if ne (empty $etcd.user) (empty $etcd.passwordSecret) }}
{{- fail "state.etcd.user and state.etcd.passwordSecret belong together: set both." }}
{{- end }}
{{- else }}
{{- if gt (int .Values.replicas) 1 }}
{{- fail (printf "replicas is %d, and state.type is sqlite: two coordinators would ruin the file. For several, set state.type=etcd and state.etcd.endpoints." (int .Values.replicas)) }}
{{- end }}
{{- if $etcd.endpoints }}
{{- fail "state.etcd.endpoints is given, but state.type is sqlite: set state.type=etcd, or remove them." }}
{{- end }}
{{- end }}
{{- if and .Values.persistence.existingClaim (not .Values.persistence.enabled) }}
{{- fail "persistence.existingClaim is given, but persistence.enabled is false: nothing would be kept on it." }}
{{- end }}
{{- if and .Values.test.enabled $tls.clientAuth.enabled (not .Values.client.certificateSecret) }}
{{- fail "tls.clientAuth.enabled: `helm test` needs a certificate, too: set client.certificateSecret, or test.enabled=false." }}
{{- end }}
{{- if and .Values.test.enabled .Values.tokens.enabled (not .Values.client.tokenSecret) }}
{{- fail "tokens.enabled: `helm test` needs a token, too: set client.tokenSecret, or test.enabled=false." }}
{{- end }}
{{- if and .Values.serviceMonitor.enabled $tls.clientAuth.enabled $tls.http (not .Values.client.certificateSecret) }}
{{- fail "tls.clientAuth.enabled: Prometheus needs a certificate, too: set client.certificateSecret, or tls.http=false with allowInsecure=true." }}
{{- end }}
{{- if and .Values.serviceMonitor.enabled .Values.tokens.enabled .Values.tokens.http (not .Values.client.tokenSecret) }}
{{- fail "tokens.enabled: Prometheus needs a token, too: set client.tokenSecret, or tokens.http=false with allowInsecure=true." }}
{{- end }}
{{- if and (not (include "muster.secured" .)) (not .Values.allowInsecure) }}
{{- fail (printf "%s: every client that reaches the port could list runs, change stores and abort barriers. Set %s (docs/kubernetes.md, \"Secure it\"), or allowInsecure=true in a trusted network." (ternary "tokens are off" "TLS is off" .Values.tls.enabled) (ternary "tokens.enabled=true or tls.clientAuth.enabled=true" "tls.enabled=true and tokens.enabled=true" .Values.tls.enabled)) }}
{{- else if and (not (include "muster.httpSecured" .)) (not .Values.allowInsecure) }}
{{- $off := list }}
{{- if not $tls.http }}{{ $off = append $off "tls.http=false" }}{{ end }}
{{- if and .Values.tokens.enabled (not .Values.tokens.http) }}{{ $off = append $off "tokens.http=false" }}{{ end }}
{{- fail (printf "%s: every client that reaches the HTTP port, or is on the way, could see the runs and the metrics. Leave it at true, or set allowInsecure=true in a trusted network." (join " and " $off)) }}
{{- end }}
{{- include "muster.checkRelay" . }}
{{- include "muster.checkWatcher" . }}
{{- include "muster.checkKeeper" . }}
{{- if .Release.IsUpgrade }}
{{- include "muster.checkUpgrade" . }}
{{- end }}
{{- end }}

{{- /* What would strand the running coordinator, asked of the cluster before anything changes. `helm template` has none to ask: no item is found. */}}
{{- define "muster.checkUpgrade" -}}
{{- $name := include "muster.fullname" . }}
{{- $tls := include "muster.tlsSecret" . }}
{{- $chart := printf "^%s-[0-9]+[.][0-9]+[.][0-9]+" (regexQuoteMeta .Chart.Name) }}
{{- /* A Service and no StatefulSet: its volume grows. */}}
{{- $known := or .Values.fullnameOverride (lookup "v1" "Service" .Release.Namespace $name) }}
{{- range (lookup "apps/v1" "StatefulSet" .Release.Namespace "").items }}
{{- $labels := default dict .metadata.labels }}
{{- $made := get $labels "helm.sh/chart" }}
{{- /* By what no alias changes. */}}
{{- $coordinator := and (eq (get $labels "app.kubernetes.io/component") "coordinator") (contains (quote "MUSTER_CONFIG") (toJson .spec.template.spec.containers)) }}
{{- if and $coordinator (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) }}
{{- if ne .metadata.name $name }}
{{- if regexMatch $chart $made }}
{{- fail (printf "the coordinator of this release is StatefulSet %q, and with nameOverride and fullnameOverride as given it would be %q: another one, without the state. Set fullnameOverride=%s, or install a release of another name." .metadata.name $name .metadata.name) }}
{{- else if not $known }}
{{- fail (printf "a coordinator of this release is StatefulSet %q, of chart %s, and %s would be %q: another one, without the state. To go on with that one under a new alias, set fullnameOverride=%s and nameOverride=%s. To have one more beside it, set fullnameOverride=%s." .metadata.name $made $.Chart.Name $name .metadata.name (get .spec.selector.matchLabels "app.kubernetes.io/name") $name) }}
{{- end }}
{{- else }}
{{- if ne (toJson .spec.selector.matchLabels) (include "muster.podIdentity" $ | fromYaml | toJson) }}
{{- fail (printf "StatefulSet %q selects its pod by app.kubernetes.io/name=%s, which Kubernetes lets nobody change: set nameOverride to what it was." $name (get .spec.selector.matchLabels "app.kubernetes.io/name")) }}
{{- end }}
{{- if and $.Values.tls.enabled $.Values.tls.certManager.enabled (not (contains (quote $tls) (toJson .spec.template.spec.volumes))) (not (lookup "v1" "Secret" $.Release.Namespace $tls)) }}
{{- fail (printf "cert-manager has not made Secret %q yet, and the coordinator would be away until it is there. Have it first: where TLS is off, upgrade with tls.enabled=false and tls.certManager.enabled=true, which makes nothing but the Certificate; where it is on, apply a Certificate of your own with secretName %s." $tls $tls) }}
{{- end }}
{{- $claims := not (empty .spec.volumeClaimTemplates) }}
{{- $inEtcd := contains "etcd://" (toJson .spec.template.spec.containers) }}
{{- if and (include "muster.etcd" $) (not $inEtcd) }}
{{- fail (printf "the state of StatefulSet %q is in SQLite%s, and with state.type=etcd its coordinators would begin without it. docs/kubernetes.md, \"Several replicas\", says how to move it." $name (ternary ", on its volume" "" $claims)) }}
{{- end }}
{{- if and $inEtcd (not (include "muster.etcd" $)) }}
{{- fail (printf "the state of StatefulSet %q is in etcd, and with state.type=sqlite its coordinator would begin without it. docs/kubernetes.md, \"Several replicas\", says how to move it." $name) }}
{{- end }}
{{- if and (hasSuffix "-0.1.0" $made) (eq (int .spec.replicas) 0) }}
{{- fail (printf "StatefulSet %q is scaled to 0 and of chart 0.1.0, which set the number of replicas: this upgrade would start the coordinator. Scale it to 1 first, when what it was stopped for is done." $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
